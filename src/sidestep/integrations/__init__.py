"""The control in other trainers: one file per host, which uses nothing else of Sidestep."""
