//! The choice of an instruction set at run time.

use std::sync::LazyLock;

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::{Kernel, scalar};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// An instruction set that there are kernels for and that this CPU has. Only detection creates values of this type:
///
/// ```
/// use metal_attention_cpu::Isa;
///
/// assert!(Isa::available().contains(&Isa::best()));
/// ```
///
/// There is no way to name one that the CPU may lack:
///
/// ```compile_fail
/// let isa = metal_attention_cpu::Isa::Avx512Vnni;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(IsaKind);

/// The instruction sets that there are kernels for, the best last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum IsaKind {
    /// Plain Rust: the reference, and what runs on CPUs without the others.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// Arm with NEON, dot products and half-precision conversion.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// Declares a module for a list of CPU features, with a function that detects them and one that runs a kernel compiled for
/// them, so that the two lists are the same.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! features {
    ($module:ident, $simd:ty, $detected:ident: $($feature:tt)*) => {
        mod $module {
            use super::*;

            pub(super) fn detected() -> bool {
                $(std::arch::$detected!($feature))&&*
            }

            /// # Safety
            ///
            /// The features must have been [`detected`].
            $(#[target_feature(enable = $feature)])*
            pub(super) unsafe fn run(kernel: impl Kernel) {
                // SAFETY: the CPU has the features, as the caller vouches.
                unsafe { kernel.run::<$simd>() }
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
features!(with_avx2, avx2::Avx2, is_x86_feature_detected: "avx2" "fma" "f16c");
#[cfg(target_arch = "x86_64")]
features!(with_avx512, avx512::Avx512, is_x86_feature_detected:
    "avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512vl" "avx512dq" "avx512vnni");
#[cfg(target_arch = "aarch64")]
features!(with_neon, neon::Neon, is_aarch64_feature_detected: "neon" "dotprod");

impl IsaKind {
    /// All instruction sets, the best last.
    const ALL: &[Self] = &[
        Self::Scalar,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512Vnni,
        #[cfg(target_arch = "aarch64")]
        Self::Neon,
    ];

    /// Whether this CPU has it.
    fn detected(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => with_avx2::detected(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => with_avx512::detected(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => with_neon::detected(),
        }
    }
}

impl Isa {
    /// Plain Rust, which every CPU runs: the reference.
    pub const SCALAR: Self = Self(IsaKind::Scalar);

    /// Every instruction set that this CPU has, the best last.
    pub fn available() -> Vec<Self> {
        IsaKind::ALL.iter().copied().filter(|set| set.detected()).map(Self).collect()
    }

    /// The best instruction set that this CPU has. For comparisons the environment variable `METAL_ATTENTION_SIMD` can name
    /// another one that the CPU has; it is read once.
    pub fn best() -> Self {
        static BEST: LazyLock<Isa> = LazyLock::new(|| {
            let requested = std::env::var("METAL_ATTENTION_SIMD").ok();
            let available = Isa::available();
            let named = available.iter().find(|isa| Some(isa.name()) == requested.as_deref());
            *named.or(available.last()).unwrap_or(&Isa::SCALAR)
        });
        *BEST
    }

    /// The name for output and for `METAL_ATTENTION_SIMD`, e.g. `"avx2"`.
    pub const fn name(self) -> &'static str {
        match self.0 {
            IsaKind::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "aarch64")]
            IsaKind::Neon => "neon-dotprod",
        }
    }

    /// Runs `kernel` compiled for this instruction set.
    pub(crate) fn run(self, kernel: impl Kernel) {
        // SAFETY: the CPU has this instruction set, which was detected before this `Isa` was created.
        unsafe {
            match self.0 {
                IsaKind::Scalar => kernel.run::<scalar::Scalar>(),
                #[cfg(target_arch = "x86_64")]
                IsaKind::Avx2 => with_avx2::run(kernel),
                #[cfg(target_arch = "x86_64")]
                IsaKind::Avx512Vnni => with_avx512::run(kernel),
                #[cfg(target_arch = "aarch64")]
                IsaKind::Neon => with_neon::run(kernel),
            }
        }
    }
}
