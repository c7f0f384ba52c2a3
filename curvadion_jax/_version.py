"""The version, known where the package is not installed, too."""

__version__ = "0.1.0"
