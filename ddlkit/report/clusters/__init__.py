"""Models on trial on clusters that others measured: rules fixed before, blind predictions, a scoreboard."""
