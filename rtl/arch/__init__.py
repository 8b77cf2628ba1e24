"""The contract: configuration, number formats, instructions, registers and events, declared once.

Hardware, golden model, assembler, compiler, driver and documents derive from these objects.
"""
