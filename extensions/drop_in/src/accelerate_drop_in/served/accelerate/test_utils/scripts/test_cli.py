"""Print that a launched script ran."""

import torch


def main():
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    print(f"Successfully ran on {count} devices")


if __name__ == "__main__":
    main()
