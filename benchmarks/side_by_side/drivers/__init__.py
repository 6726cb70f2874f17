"""Programs that measure one contender each: arguments in, one JSON object on the last line of standard output."""
