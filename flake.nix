# nix run .            the program, built from these sources
# nix profile install  the same, installed
{
  description = "Runs GGUF language models at the speed of the hardware under it";
  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-unstable";

  outputs =
    { self, nixpkgs }:
    let
      systems = [ "x86_64-linux" "aarch64-linux" "aarch64-darwin" ];
      each = make: nixpkgs.lib.genAttrs systems (system: make nixpkgs.legacyPackages.${system});
    in
    {
      packages = each (pkgs: {
        default = pkgs.rustPlatform.buildRustPackage {
          pname = "metal-attention";
          version = (fromTOML (builtins.readFile ./Cargo.toml)).workspace.package.version;
          src = self;
          cargoLock.lockFile = ./Cargo.lock;
          cargoBuildFlags = [ "--bin" "metal-attention" ];
          # scripts/test runs the tests; they take an hour.
          doCheck = false;
          nativeBuildInputs = [ pkgs.installShellFiles pkgs.makeWrapper ];
          postInstall = ''
            installShellCompletion --cmd metal-attention \
              --bash <($out/bin/metal-attention completions bash) \
              --zsh <($out/bin/metal-attention completions zsh) \
              --fish <($out/bin/metal-attention completions fish)
          '' + pkgs.lib.optionalString pkgs.stdenv.hostPlatform.isLinux ''
            # The Vulkan loader, and the folder in which NixOS has the drivers of GPUs.
            wrapProgram $out/bin/metal-attention \
              --suffix LD_LIBRARY_PATH : ${pkgs.lib.makeLibraryPath [ pkgs.vulkan-loader ]}:/run/opengl-driver/lib
          '';
          meta = {
            description = "Runs GGUF language models at the speed of the hardware under it";
            license = [ pkgs.lib.licenses.mit pkgs.lib.licenses.asl20 ];
            mainProgram = "metal-attention";
            platforms = systems;
          };
        };
      });
    };
}
