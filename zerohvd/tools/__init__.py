"""Around the training: the Horovod builder, the doctor, launchers, the command line."""
