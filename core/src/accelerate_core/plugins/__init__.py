"""Discovery, triggers, selection, and the manager of one Accelerator's plugins. No torch here."""
