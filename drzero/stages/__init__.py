"""The stages: functions over one composed config each, and the parts they share. The loop runs them."""
