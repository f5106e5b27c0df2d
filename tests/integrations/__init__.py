"""The callbacks of `spartan.integrations`, in the frameworks they are for, against plain loops of the same run."""
