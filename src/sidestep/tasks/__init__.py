"""What is asked and how answers are scored. Loads no torch. Own data: docs/tasks.md."""
