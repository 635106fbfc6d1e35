"""The kernels run in Triton's interpreter here: this folder is collected only with TRITON_INTERPRET=1 in the environment."""
