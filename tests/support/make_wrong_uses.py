"""Make ``docs/messages.md``: what one may get wrong, and the message that it gets.

    python tests/support/make_wrong_uses.py

Run it where a message was changed on purpose, and read what it says now.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Try every wrong use, and write the page."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "char_lm")]
    import conftest  # noqa: F401  # the devices, before anything uses JAX
    from wrong_uses.page import page

    (ROOT / "docs" / "messages.md").write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
