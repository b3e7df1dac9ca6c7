"""What every measurement needs: repeats and their spread, the page cache, the machine, the ceilings."""
