"""Commands that read several rooms and change no results. Code that a stage needs belongs below."""
