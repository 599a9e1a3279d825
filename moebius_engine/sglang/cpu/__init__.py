"""Real SGLang on a machine without CUDA: one process a rank, gloo, fp32."""
