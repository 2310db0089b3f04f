"""How close emulated devices come to the times that they are to take."""
