"""How the time and memory of planning whole plans grow with devices and units."""
