"""Tables and figures; the only part that imports matplotlib."""
