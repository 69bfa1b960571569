"""What a checkpoint says, as host data: no tensor library, so that every device may read it."""
