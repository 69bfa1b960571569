"""What ranks exchange."""
