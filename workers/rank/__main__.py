from workers.rank.main import main

main()
