"""How far a method's outputs are from conventional decoding's: KL over real text, and laws."""
