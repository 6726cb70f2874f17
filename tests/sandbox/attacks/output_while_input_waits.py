# Prints more than a pipe holds before it reads its input, which is more than a pipe holds too. stdin: 3000000
sys.stdout.write("x" * 900_000)
sys.stdout.flush()
if len(sys.stdin.read()) != 3_000_000:
    breach("input lost")
end()
