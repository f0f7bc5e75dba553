"""Speed and sameness, measured on a user's own pair: `runner.run_speed`, `certify.certify`, `tasks.load_task`."""
