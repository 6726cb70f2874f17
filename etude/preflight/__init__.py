"""What one does before training an agent: check its configuration, try its tools, take the model's seat, begin a new one."""
