"""What models are made of: functions of arrays that hold their weights."""
