"""The layers of models: functions of arrays that hold their weights."""
