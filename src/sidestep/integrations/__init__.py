"""The control in other trainers: one file per host, using the control and nothing else of Sidestep."""
