"""Jobs that outlive their devices: who takes part, and how those who do go on. Import from its modules."""
