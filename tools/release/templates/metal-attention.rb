class MetalAttention < Formula
  desc "@DESCRIPTION@"
  homepage "@ADDRESS@"
  version "@VERSION@"
  license any_of: ["MIT", "Apache-2.0"]

  on_macos do
    depends_on arch: :arm64
    url "@DOWNLOADS@/v@VERSION@/@ARCHIVE:aarch64-apple-darwin@"
    sha256 "@SHA256:aarch64-apple-darwin@"
  end

  on_linux do
    on_intel do
      url "@DOWNLOADS@/v@VERSION@/@ARCHIVE:x86_64-unknown-linux-gnu@"
      sha256 "@SHA256:x86_64-unknown-linux-gnu@"
    end
    on_arm do
      url "@DOWNLOADS@/v@VERSION@/@ARCHIVE:aarch64-unknown-linux-gnu@"
      sha256 "@SHA256:aarch64-unknown-linux-gnu@"
    end
  end

  def install
    bin.install "metal-attention"
    man1.install Dir["man/*.1"]
    bash_completion.install "completions/metal-attention"
    zsh_completion.install "completions/_metal-attention"
    fish_completion.install "completions/metal-attention.fish"
  end

  service do
    run [opt_bin/"metal-attention", "serve"]
    keep_alive true
    log_path var/"log/metal-attention.log"
    error_log_path var/"log/metal-attention.log"
  end

  test do
    assert_match "metal-attention #{version}", shell_output("#{bin}/metal-attention --version")
    assert_match "little girl", shell_output("#{bin}/metal-attention run --device cpu -p 'Once upon a time' --temp 0 -n 20")
  end
end
