"""What is made of results files: tables, comparisons, plots, pages and the generated parts of documents."""
