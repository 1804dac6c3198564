"""What a run leaves behind and shows: metrics, rollouts, alarms, console, report. Reads and writes; never decides anything."""
