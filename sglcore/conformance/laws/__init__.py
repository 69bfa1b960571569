"""The laws of the kit, one file for each part of a device."""
