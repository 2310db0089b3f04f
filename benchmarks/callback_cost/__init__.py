"""What the callbacks that measure ranks cost."""
