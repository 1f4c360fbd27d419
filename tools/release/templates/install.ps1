# Installs metal-attention @VERSION@ from @ADDRESS@:
#   irm @LATEST@/install.ps1 | iex
# With options:
#   & ([scriptblock]::Create((irm @LATEST@/install.ps1))) -To C:\tools
#   & ([scriptblock]::Create((irm @LATEST@/install.ps1))) -Uninstall
param(
    [string]$Version = "@VERSION@",
    [string]$To = (Join-Path $env:LOCALAPPDATA "Programs\metal-attention"),
    [switch]$Uninstall
)
$ErrorActionPreference = "Stop"
$ProgressPreference = "SilentlyContinue"

# Changes the list of folders in the user's PATH. Other folders keep their variables, such as %USERPROFILE%.
function Set-UserPath([scriptblock]$change) {
    $key = [Microsoft.Win32.Registry]::CurrentUser.OpenSubKey("Environment", $true)
    try {
        $folders = @($key.GetValue("Path", "", "DoNotExpandEnvironmentNames") -split ";" | Where-Object { $_ })
        $new = @(& $change $folders) -join ";"
        if ($new -eq ($folders -join ";")) { return }
        $key.SetValue("Path", $new, "ExpandString")
    } finally {
        $key.Dispose()
    }
    # Tells running programs, such as the desktop, that variables have changed.
    [Environment]::SetEnvironmentVariable("METAL_ATTENTION_INSTALLED", "1", "User")
    [Environment]::SetEnvironmentVariable("METAL_ATTENTION_INSTALLED", $null, "User")
}

function Uninstall-MetalAttention {
    $program = Join-Path $To "metal-attention.exe"
    if (-not (Test-Path $program)) {
        throw "install.ps1: there is no $program. Name its folder with -To."
    }
    Remove-Item $program
    if (-not (Get-ChildItem $To)) { Remove-Item $To }
    Set-UserPath { param($folders) $folders | Where-Object { $_ -ne $To } }
    Write-Host "Removed $program. Downloaded models stay in the cache of the Hugging Face hub (~\.cache\huggingface)."
}

function Install-MetalAttention {
    # A 32-bit shell on 64-bit Windows names the machine in the second variable.
    $machine = if ($env:PROCESSOR_ARCHITEW6432) { $env:PROCESSOR_ARCHITEW6432 } else { $env:PROCESSOR_ARCHITECTURE }
    # Windows 11 on ARM runs programs for x86-64, too.
    if ($machine -notin "AMD64", "ARM64") {
        throw "install.ps1: there is no program for Windows on $machine. Build it: cargo install --locked --git @ADDRESS@ metal-attention-cli"
    }
    [Net.ServicePointManager]::SecurityProtocol = [Net.ServicePointManager]::SecurityProtocol -bor [Net.SecurityProtocolType]::Tls12
    $name = "metal-attention-$Version-x86_64-pc-windows-msvc"
    $work = Join-Path ([IO.Path]::GetTempPath()) ([Guid]::NewGuid())
    New-Item -ItemType Directory $work | Out-Null
    try {
        foreach ($file in "SHA256SUMS", "$name.zip") {
            try {
                Invoke-WebRequest -UseBasicParsing "@DOWNLOADS@/v$Version/$file" -OutFile (Join-Path $work $file)
            } catch {
                throw "install.ps1: could not download @DOWNLOADS@/v$Version/${file}: $_"
            }
        }
        $line = Get-Content (Join-Path $work "SHA256SUMS") | Where-Object { ($_ -split "[ *]+", 2)[1] -eq "$name.zip" }
        if (-not $line) { throw "install.ps1: SHA256SUMS of version $Version does not name $name.zip." }
        $expected = ($line -split " ")[0]
        $actual = (Get-FileHash -Algorithm SHA256 (Join-Path $work "$name.zip")).Hash.ToLower()
        if ($actual -ne $expected) {
            throw "install.ps1: $name.zip has the SHA-256 $actual, not $expected. Nothing was installed: try again."
        }
        Expand-Archive (Join-Path $work "$name.zip") $work
        New-Item -ItemType Directory -Force $To | Out-Null
        Copy-Item (Join-Path $work "$name\metal-attention.exe") $To -Force
    } finally {
        Remove-Item -Recurse -Force $work
    }
    Set-UserPath { param($folders) if ($To -in $folders) { $folders } else { $folders + $To } }
    if ($To -notin ($env:Path -split ";")) { $env:Path += ";$To" }
    Write-Host "Installed $To\metal-attention.exe and added its folder to your PATH."
    Write-Host 'Try it: metal-attention run -p "Once upon a time"'
}

if ($Uninstall) { Uninstall-MetalAttention } else { Install-MetalAttention }
