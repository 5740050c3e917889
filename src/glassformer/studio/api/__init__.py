"""One module per view: functions of (models, request) that return JSON values, tensors, or emit events."""
