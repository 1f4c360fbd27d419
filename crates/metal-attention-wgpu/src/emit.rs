//! Translates kernels to the shading languages of the backends, for reading and for offline compilation in tests.

use naga::back::{hlsl, msl, spv};
use naga::proc::BoundsCheckPolicies;
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};

use crate::pipelines::PipelineKey;
use crate::shader::{ShaderFeatures, wgsl};

/// A shading language.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ShaderLanguage {
    /// WebGPU's shading language, in which the kernels are written.
    Wgsl,
    /// SPIR-V, for Vulkan: binary, little-endian words of 32 bits.
    SpirV,
    /// Metal's shading language.
    Msl,
    /// DirectX's shading language.
    Hlsl,
}

impl ShaderLanguage {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Wgsl, Self::SpirV, Self::Msl, Self::Hlsl];

    /// Its usual abbreviation in lower case, e.g. `msl`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wgsl => "wgsl",
            Self::SpirV => "spirv",
            Self::Msl => "msl",
            Self::Hlsl => "hlsl",
        }
    }

    /// `features` without those that devices of this language lack: Metal has matrix units of 8x8 only and no integer
    /// dot products, HLSL has no matrix units.
    pub fn features(self, features: ShaderFeatures) -> ShaderFeatures {
        ShaderFeatures {
            integer_dot: features.integer_dot && self != Self::Msl,
            cooperative_f16: features.cooperative_f16 && self != Self::Msl && self != Self::Hlsl,
            cooperative_f32: features.cooperative_f32 && self != Self::Hlsl,
            ..features
        }
    }
}

/// A kernel that does not translate: a defect of the kernel or of the translator.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the kernel {kernel} does not translate to {}: {why}", language.name())]
pub struct EmitError {
    /// The kernel's name.
    pub kernel: String,
    /// The requested language.
    pub language: ShaderLanguage,
    /// The translator's message.
    pub why: String,
}

/// Translates the kernel `key` to `language`, as it runs in release builds (without checks of its accesses) on a device
/// with `features`, as far as the language [has them](ShaderLanguage::features).
///
/// ```
/// use metal_attention_wgpu::{ShaderFeatures, ShaderLanguage, catalogue, emit};
///
/// let kernels = catalogue();
/// let argmax = kernels.iter().find(|key| key.name == "argmax").unwrap();
/// let metal = emit(argmax, ShaderFeatures::default(), ShaderLanguage::Msl)?;
/// assert!(String::from_utf8_lossy(&metal).contains("kernel void main_("));
/// # Ok::<(), metal_attention_wgpu::EmitError>(())
/// ```
pub fn emit(key: &PipelineKey, features: ShaderFeatures, language: ShaderLanguage) -> Result<Vec<u8>, EmitError> {
    let source = wgsl(key.file, &key.constants, language.features(features));
    let error = |why| EmitError { kernel: key.name.clone(), language, why };
    let module = parse(&source).map_err(error)?;
    translate(&module, source, features, language).map_err(error)
}

/// Parses WGSL. The error quotes the line.
fn parse(source: &str) -> Result<naga::Module, String> {
    naga::front::wgsl::parse_str(source).map_err(|e| e.emit_to_string(source))
}

/// Translates `module`, which was parsed from `source`, to `language`.
fn translate(
    module: &naga::Module,
    source: String,
    features: ShaderFeatures,
    language: ShaderLanguage,
) -> Result<Vec<u8>, String> {
    let capabilities = match language {
        ShaderLanguage::Wgsl => Capabilities::all(),
        ShaderLanguage::SpirV => spv::supported_capabilities(),
        ShaderLanguage::Msl => msl::supported_capabilities(),
        ShaderLanguage::Hlsl => hlsl::supported_capabilities(),
    };
    let validated = Validator::new(ValidationFlags::all(), capabilities).validate(module);
    let info = validated.map_err(|e| e.emit_to_string(&source))?;
    match language {
        ShaderLanguage::Wgsl => Ok(source.into_bytes()),
        ShaderLanguage::SpirV => spirv(module, &info).map_err(|e| e.to_string()),
        ShaderLanguage::Msl => metal(module, &info).map_err(|e| e.to_string()),
        ShaderLanguage::Hlsl => directx(module, &info, features.f16).map_err(|e| e.to_string()),
    }
}

/// SPIR-V 1.6, the version of Vulkan 1.3.
fn spirv(module: &naga::Module, info: &ModuleInfo) -> Result<Vec<u8>, spv::Error> {
    let options = spv::Options {
        lang_version: (1, 6),
        flags: spv::WriterFlags::DEBUG,
        bounds_check_policies: BoundsCheckPolicies::default(),
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..Default::default()
    };
    let words = spv::write_vec(module, info, &options, None)?;
    Ok(words.into_iter().flat_map(u32::to_le_bytes).collect())
}

/// MSL 2.4, the version of macOS 12. Buffers have the indices of their bindings.
fn metal(module: &naga::Module, info: &ModuleInfo) -> Result<Vec<u8>, msl::Error> {
    let resources = module.global_variables.iter().filter_map(|(_, variable)| variable.binding).map(|binding| {
        let target = msl::BindTarget { buffer: Some(binding.binding as u8), mutable: true, ..Default::default() };
        (binding, target)
    });
    let resources = msl::EntryPointResources {
        resources: resources.collect(),
        // The buffer with the lengths of all others has an index beyond all bindings of a kernel.
        sizes_buffer: Some(8),
        ..Default::default()
    };
    let options = msl::Options {
        lang_version: (2, 4),
        per_entry_point_map: [("main".to_owned(), resources)].into(),
        fake_missing_bindings: false,
        bounds_check_policies: BoundsCheckPolicies::default(),
        zero_initialize_workgroup_memory: false,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..Default::default()
    };
    let (text, _) = msl::write_string(module, info, &options, &msl::PipelineOptions::default())?;
    Ok(text.into_bytes())
}

/// Shader model 6.2 if 16-bit floats are used, else 6.0, the first with subgroup (wave) operations.
fn directx(module: &naga::Module, info: &ModuleInfo, f16: bool) -> Result<Vec<u8>, hlsl::Error> {
    let options = hlsl::Options {
        shader_model: if f16 { hlsl::ShaderModel::V6_2 } else { hlsl::ShaderModel::V6_0 },
        zero_initialize_workgroup_memory: false,
        restrict_indexing: false,
        force_loop_bounding: false,
        ..Default::default()
    };
    let mut text = String::new();
    hlsl::Writer::new(&mut text, &options, &hlsl::PipelineOptions::default()).write(module, info, None)?;
    Ok(text.into_bytes())
}

#[cfg(test)]
mod tests;
