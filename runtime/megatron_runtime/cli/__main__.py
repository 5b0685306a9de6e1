from megatron_runtime.cli import main

if __name__ == "__main__":
    main(prog_name="megatron")
