"""Peak speed of GPUs by data sheet, the denominator of MFU."""

# Dense bf16 matrix products with fp32 accumulation, in TFLOP/s, from the vendors' documents; half the figure if a sheet
# gives only the one with sparsity. The first key that is part of the device's name counts, so longer names of a family
# stand before shorter ones. Compared in November 2026 with reprints of these documents, which agree but for rounding.
# No reprint was found for GH200, H200 NVL, H800 PCIe and A800, which have the chips of their neighbours here. The L40
# and the GeForce cards accumulate in fp32 at half the speed that is often quoted for them.
_PEAK_BF16_TFLOPS = (
    ("GB200", 2500.0),  # NVIDIA GB200 NVL72 sheet: 180 PFLOP/s over 72 GPUs
    ("B200", 2250.0),  # NVIDIA HGX B200 sheet: 18 PFLOP/s over 8 GPUs
    ("B100", 1750.0),  # NVIDIA HGX B100 sheet: 14 PFLOP/s over 8 GPUs
    ("H200 NVL", 835.5),  # NVIDIA H200 sheet: 1,671 with sparsity
    ("GH200", 989.4),  # NVIDIA GH200 sheet: 1,979 with sparsity
    ("H200", 989.4),  # NVIDIA H200 sheet: 1,979 with sparsity
    ("H100 NVL", 835.5),  # NVIDIA H100 sheet: 1,671 with sparsity
    ("H100 PCIe", 756.5),  # NVIDIA H100 sheet: 1,513 with sparsity
    ("H100", 989.4),  # NVIDIA H100 sheet (SXM): 1,979 with sparsity
    ("H800 PCIe", 756.5),  # NVIDIA H800 sheet: 1,513 with sparsity
    ("H800", 989.4),  # NVIDIA H800 sheet (SXM): 1,979 with sparsity
    ("H20", 148.0),  # NVIDIA H20 sheet
    ("A100", 312.0),  # NVIDIA A100 sheet
    ("A800", 312.0),  # NVIDIA A800 sheet
    ("A10G", 70.0),  # NVIDIA A10G sheet (AWS g5): 140 with sparsity
    ("A10", 125.0),  # NVIDIA A10 sheet
    ("A30", 165.0),  # NVIDIA A30 sheet
    ("A40", 149.7),  # NVIDIA A40 sheet
    ("L40S", 362.05),  # NVIDIA L40S sheet
    ("L40", 181.05),  # NVIDIA L40 sheet
    ("L4", 121.0),  # NVIDIA L4 sheet: 242 with sparsity
    ("RTX 4090", 165.2),  # NVIDIA Ada architecture paper, appendix A
    ("RTX 3090", 71.0),  # NVIDIA GA102 architecture paper
    ("MI300X", 1307.4),  # AMD Instinct MI300X sheet
)

# Words in the names of GPU slices, and of devices with a listed one's name but another speed.
_OTHER_DEVICES = frozenset({"MIG", "LAPTOP", "TI", "D"})


def peak_bf16_flops(device_name: str) -> float | None:
    """Peak dense bf16 speed of a GPU by its data sheet, FLOP/s; None for one that is not in the table."""
    words = device_name.upper().replace("-", " ").split()
    if _OTHER_DEVICES.intersection(words):
        return None
    for name, tflops in _PEAK_BF16_TFLOPS:
        parts = name.upper().split()
        if all(part in words for part in parts):
            return tflops * 1e12
    return None
