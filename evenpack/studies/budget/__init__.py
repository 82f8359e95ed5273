"""What a run will take before it is started: its batch, epochs, operations and hours (`evenpack budget`)."""
