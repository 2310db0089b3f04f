"""How soon, and how far, a run that moves its shares recovers when a device halves its speed."""
