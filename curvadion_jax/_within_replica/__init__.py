"""What moves data between the devices of one replica, and never to another one."""

from curvadion_jax._within_replica._by_device import by_device, shared_by
from curvadion_jax._within_replica._by_matrix import Stack
from curvadion_jax._within_replica._devices import Devices

__all__ = ["Devices", "Stack", "by_device", "shared_by"]
