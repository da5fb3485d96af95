import os
os.environ['XLA_FLAGS']='--xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS']='cpu'
os.environ['JAX_NUMPY_DTYPE_PROMOTION']='strict'
