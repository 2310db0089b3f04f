"""What runs, measured: marks around units, FLOPs, live memory, devices and links."""
