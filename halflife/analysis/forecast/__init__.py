"""How far trained models remember: forecast from one short reading, and measured."""
