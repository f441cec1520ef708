"""Between engines and trainer: how far rollouts may run ahead, and how groups become a batch."""
