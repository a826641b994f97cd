"""Options, one yaml a class: the folder's name is the group, the file's name the option."""
