"""The budget of a run before it is started: its batch, epochs, operations and hours (`evenpack budget`)."""
