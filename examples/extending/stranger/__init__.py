"""What a stranger adds to zoo: one algorithm, one reward, one data set."""
