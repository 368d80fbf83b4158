from chairlift.cli import main

main()
