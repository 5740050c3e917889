"""One file per view: functions of (shelf, request) to plain data, packets of tensors, or a stream of events."""
