"""Laws of the slowest device, from one number of devices to others."""
