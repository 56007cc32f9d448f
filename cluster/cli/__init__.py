"""The `dflash` command."""
