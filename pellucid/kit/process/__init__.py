"""What may crash, hang or eat all memory, in processes of its own."""
